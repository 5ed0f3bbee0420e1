document.addEventListener("pointermove", event => {
  const figure = event.target.closest ? event.target.closest("figure[data-hover]") : null;
  document.querySelectorAll(".hover, .at").forEach(old => old.remove());
  if (!figure) return;
  const {edges, range, name, lines} = JSON.parse(figure.dataset.hover);
  const box = figure.querySelector("img, svg").getBoundingClientRect();
  const outer = figure.getBoundingClientRect();
  const share = ((event.clientX - box.left) / box.width - edges[0]) / (edges[1] - edges[0]);
  if (share < -0.02 || share > 1.02 || event.clientY < box.top) return;
  const wanted = range[0] + share * (range[1] - range[0]);
  const near = xs => xs.reduce((best, x, i) => Math.abs(x - wanted) < Math.abs(xs[best] - wanted) ? i : best, 0);
  const found = lines.filter(line => line[1].length).map(line => [line[0], line[1][near(line[1])], line[2][near(line[1])]]);
  if (!found.length) return;
  const at = found.map(f => f[1]).reduce((a, b) => Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a);
  const text = found.map(f => `${f[0]} ${f[2].toLocaleString("en", {maximumSignificantDigits: 4})}`
    + (f[1] === at ? "" : ` (${f[1].toLocaleString("en")})`));
  const note = document.createElement("div");
  note.className = "hover";
  note.textContent = [`${name} ${at.toLocaleString("en")}`, ...text].join("\n");
  const line = document.createElement("div");
  line.className = "at";
  const x = box.left - outer.left + box.width * (edges[0] + (edges[1] - edges[0]) * (at - range[0]) / ((range[1] - range[0]) || 1));
  line.style.cssText = `left:${x}px;top:${box.top - outer.top}px;height:${box.height}px`;
  figure.append(line, note);
  const fits = x + 14 + note.offsetWidth < outer.width;
  const left = Math.max(0, fits ? x + 10 : x - 10 - note.offsetWidth);
  note.style.cssText = `left:${left}px;top:${box.top - outer.top + 6}px`;
});
