// Draws every figure that has data-chart, by uPlot. Call drawCharts again after parts of the page were replaced.
const colour = name => name === "ink" ? getComputedStyle(document.body).color : name;
const ruler = () => getComputedStyle(document.body).getPropertyValue("--line");
const short = value => value == null ? "" : value !== 0 && Math.abs(value) < 1e-4 ? value.toExponential()
  : Number(value.toPrecision(6)).toLocaleString("en", Math.abs(value) < 1e4 ? {maximumSignificantDigits: 6} : {notation: "compact"});
const wholeSteps = [1, 2, 5].flatMap(f => Array.from({length: 12}, (_, k) => f * 10 ** k)).sort((a, b) => a - b);

function chartOptions(chart, width) {
  const series = [{label: chart.x, value: (u, v) => v == null ? "" : short(v)}], bands = [];
  for (const line of chart.lines) {
    const at = series.length;
    series.push({
      label: line.label, width: line.width, dash: line.dash, alpha: line.faint ? 0.35 : 1,
      stroke: () => colour(line.colour), value: (u, v) => v == null ? "" : Number(v.toPrecision(4)).toLocaleString("en", {maximumSignificantDigits: 4}),
      class: line.faint ? "unlisted" : "listed",
      ...(line.bars ? {paths: uPlot.paths.bars({size: [0.95, 100]}), fill: line.colour} : {}),
      ...(line.bars || line.faint ? {points: {show: false}} : {points: {size: 5, fill: () => colour(line.colour)}}),
    });
    if (line.columns.length > 2) {
      for (const label of ["low", "high"]) series.push({label, class: "unlisted", width: 0, points: {show: false}});
      bands.push({series: [at + 2, at + 1], fill: `color-mix(in srgb, ${colour(line.colour)} 18%, transparent)`});
    }
  }
  const axis = {stroke: () => colour("ink"), grid: {stroke: ruler, width: 1}, ticks: {show: false}, font: "11px system-ui, sans-serif",
    labelFont: "11px system-ui, sans-serif", labelSize: 16, labelGap: 0, values: (u, ticks) => ticks.map(short)};
  const whole = !chart.lines[0].bars && chart.lines.every(line => line.columns[0].every(Number.isInteger));
  return {
    width, height: 210, series, bands, legend: {markers: {width: 2}},
    scales: {
      x: {time: false, range: (u, low, high) => chart.range ?? widen(low, high, 0.02)},
      y: {distr: chart.log ? 3 : 1, range: (u, low, high) => chart.log ? [low / 1.1, high * 1.1] : widenY(chart, low, high)},
    },
    axes: [
      {...axis, label: chart.x, size: 24, space: 45, ...(whole ? {incrs: wholeSteps} : {})},
      {...axis, label: chart.y, space: 28, size: (u, texts) => 12 + 6.2 * Math.max(2, ...(texts ?? []).map(text => (text ?? "").length)),
        ...(chart.log ? {filter: (u, ticks) => ticks.map(tick => "125".includes(Number(tick.toPrecision(3)).toExponential().split("e")[0]) ? tick : null)} : {})},
    ],
    cursor: {y: false, points: {size: 7}, dataIdx: nearestIndex}, hooks: {draw: [u => drawMarks(u, chart)]},
  };
}

function widen(low, high, share) {
  const margin = share * (high - low) || 0.05 * Math.abs(high) || 0.5;
  return [low - margin, high + margin];
}

function widenY(chart, low, high) {
  const [bottom, top] = widen(chart.zero ? Math.min(0, low) : low, high, 0.05);
  return [chart.zero && low >= 0 ? 0 : bottom, top];
}

// Lines have points at different positions: show of each the one that is nearest to the pointer.
function nearestIndex(u, i, hovered) {
  const values = u.data[i];
  for (let d = 0; d < values.length; d++)
    for (const k of [hovered - d, hovered + d]) if (values[k] != null) return k;
  return hovered;
}

function drawMarks(u, chart) {
  const {left, top, width, height} = u.bbox, ctx = u.ctx;
  ctx.save();
  ctx.beginPath();
  ctx.rect(left, top, width, height);
  ctx.clip();
  ctx.beginPath();
  ctx.strokeStyle = "#888";
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
  for (const x of chart.x_marks ?? []) { const at = u.valToPos(x, "x", true); ctx.moveTo(at, top); ctx.lineTo(at, top + height); }
  for (const y of chart.y_marks ?? []) { const at = u.valToPos(y, "y", true); ctx.moveTo(left, at); ctx.lineTo(left + width, at); }
  ctx.stroke();
  ctx.restore();
}

function drawCharts() {
  for (const figure of document.querySelectorAll("figure[data-chart]:not([data-drawn])")) {
    figure.dataset.drawn = "";
    const chart = JSON.parse(figure.dataset.chart), body = figure.querySelector("div");
    // uPlot draws null as a gap, and joins points over positions that only other lines have.
    const data = uPlot.join(chart.lines.map(line => line.columns));
    let plot = null;
    const draw = () => { plot?.destroy(); plot = new uPlot(chartOptions(chart, body.clientWidth), data, body); };
    const resize = () => { if (body.clientWidth) plot ? plot.setSize({width: body.clientWidth, height: 210}) : draw(); };
    resize();
    // A figure inside closed <details> has no width: it is drawn when it gets one.
    new ResizeObserver(() => requestAnimationFrame(resize)).observe(body);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plot && draw());
  }
}
drawCharts();
