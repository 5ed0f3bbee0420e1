"""Implements a differentiable text rendering reward: the likelihood of the requested text.

Source of the loss: connectionist temporal classification (CTC), Graves et al., ICML 2006. The
recognizer is that of PP-OCRv4 in `RapidOCRLine`, run in torch: ONNX Runtime has no gradients on
installations for inference. `OnnxNetwork` covers the operators of small recognition networks.
Source of the operators: the ONNX operator reference, opset 12.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from flowalign.types import Loadable, MediaBatch, RewardSpec
from flowalign.utils.imports import import_optional
from reward_models.backbones.reward_bases import ScreenedReward, Unscorable, metadata_of
from reward_models.detection.ocr import find_target


def _channels_last(x: Tensor) -> Tensor:
    """Return x in the memory format with the faster convolutions on CPUs."""
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    top, left, bottom, right = options["pads"]
    return F.conv2d(
        F.pad(x, (left, right, top, bottom)),
        weight,
        bias,
        options["strides"],
        dilation=options["dilations"],
        groups=options["group"],
    )


def _normalise(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, epsilon: float, **_: Any
) -> Tensor:
    return F.batch_norm(x, mean, var, weight, bias, eps=epsilon)


def _pool(x: Tensor, kernel_shape: list[int], strides: list[int], **_: Any) -> Tensor:
    return F.avg_pool2d(x, kernel_shape, strides)


def _cast(x: Tensor, to: int) -> Tensor:
    return x.to({1: torch.float32, 6: torch.int32, 7: torch.int64}[to])


def _slice(x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor, *_: Tensor) -> Tensor:
    for start, end, axis in zip(starts.tolist(), ends.tolist(), axes.tolist(), strict=True):
        x = x[(slice(None),) * axis + (slice(start, end),)]
    return x


def _reshape(x: Tensor, shape: Tensor) -> Tensor:
    return x.reshape([size or x.shape[i] for i, size in enumerate(shape.tolist())])


def _squeeze(x: Tensor, axes: list[int]) -> Tensor:
    return x.squeeze(tuple(axes))


OPERATORS: Mapping[str, Callable[..., Tensor]] = {
    "Add": torch.add,
    "AveragePool": _pool,
    "BatchNormalization": _normalise,
    "Cast": _cast,
    "Clip": torch.clamp,
    "Concat": lambda *parts, axis: torch.cat(parts, axis),
    "Conv": _convolve,
    "Div": torch.div,
    "HardSwish": F.hardswish,
    "GlobalAveragePool": lambda x: x.mean((2, 3), keepdim=True),
    "HardSigmoid": lambda x, alpha, beta: (alpha * x + beta).clamp(0, 1),
    "MatMul": torch.matmul,
    "Mul": torch.mul,
    "Pow": torch.pow,
    "ReduceMean": lambda x, axes, keepdims=1: x.mean(axes, keepdim=bool(keepdims)),
    "Relu": torch.relu,
    "Reshape": _reshape,
    "Shape": lambda x: torch.tensor(x.shape),
    "Sigmoid": torch.sigmoid,
    "Slice": _slice,
    "Softmax": lambda x, axis: x.softmax(axis),
    "Sqrt": torch.sqrt,
    "Squeeze": _squeeze,
    "Sub": torch.sub,
    "Transpose": lambda x, perm: x.permute(perm),
}
"""Torch function of each operator; its attributes are keyword arguments."""


class OnnxNode(NamedTuple):
    """Operation of a network."""

    operator: str
    inputs: Sequence[str]
    output: str
    options: Mapping[str, Any]


def fuse_hard_swish(nodes: Sequence[OnnxNode], constants: Mapping[str, Tensor]) -> list[OnnxNode]:
    """Replace each x * clip(x + 3, 0, 6) / 6 by one operator, which is several times faster."""
    fused: list[OnnxNode] = []
    for node in nodes:
        fused.append(node)
        if [some.operator for some in fused[-4:]] == ["Add", "Clip", "Mul", "Div"]:
            add, clip, product, quotient = fused[-4:]
            names = [add.inputs[1], *clip.inputs[1:], quotient.inputs[1]]
            numbers = [constants[name].item() for name in names if name in constants]
            if numbers == [3, 0, 6, 6] and add.inputs[0] in product.inputs:
                fused[-4:] = [OnnxNode("HardSwish", add.inputs[:1], quotient.output, {})]
    return fused


class OnnxNetwork(nn.Module):
    """Frozen network of an ONNX file with one input and one output.

    Raise ValueError for operators that are not in `OPERATORS`.
    """

    def __init__(self, path: str | Path):
        super().__init__()
        onnx = import_optional("onnx", "ocr")
        model = onnx.load(str(path))
        self.metadata = {entry.key: entry.value for entry in model.metadata_props}
        graph, read = model.graph, onnx.helper.get_attribute_value
        (self.input,), (self.output,) = (
            [v.name for v in some] for some in (graph.input, graph.output)
        )
        constants = {tensor.name: tensor for tensor in graph.initializer}
        nodes: list[OnnxNode] = []
        for node in graph.node:
            options = {a.name: read(a) for a in node.attribute}
            if node.op_type == "Constant":
                constants[node.output[0]] = options["value"]
            else:
                nodes.append(OnnxNode(node.op_type, list(node.input), node.output[0], options))
        unknown = sorted({node.operator for node in nodes} - {*OPERATORS})
        if unknown:
            raise ValueError(f"{path} has the operators {unknown}, which torch does not run here")
        arrays = {name: onnx.numpy_helper.to_array(tensor) for name, tensor in constants.items()}
        self.constants = {
            name: _channels_last(torch.from_numpy(array.copy())) for name, array in arrays.items()
        }
        self.nodes = fuse_hard_swish(nodes, self.constants)

    def forward(self, x: Tensor) -> Tensor:
        """Return the network's output, differentiable in its input."""
        values = {**self.constants, self.input: _channels_last(x)}
        for operator, inputs, output, options in self.nodes:
            values[output] = OPERATORS[operator](*(values[name] for name in inputs), **options)
        return values[self.output]


_HEIGHT = 48
"""Height in pixels to which the recognizer's images are resized."""
_LEAST = 1e-30
"""Smallest probability, so that logarithms are finite."""


class TextLikelihood(ScreenedReward, Loadable):
    """Scores the CTC log-likelihood of the requested text in nats per character, at most 0.

    It reads an image as one line of text, like `RapidOCRLine`, and is differentiable in the pixels.
    The target is that of `OCR`, and upper and lower case differ. Samples without a target, or with
    a character that the recognizer does not know, cannot be scored. Needs the extra `ocr`.
    """

    def __init__(self) -> None:
        self.spec = RewardSpec(
            name="text_likelihood",
            dims=("text_likelihood",),
            modality="image",
            scale=(float("-inf"), 0.0),
            licence="Apache-2.0",
            differentiable=True,
            version="rapidocr-onnxruntime 1.x PP-OCRv4 recognizer",
        )

    def load(self) -> None:
        """Convert the network."""
        models = Path(import_optional("rapidocr_onnxruntime", "ocr").__file__).parent / "models"
        self._network = OnnxNetwork(models / "ch_PP-OCRv4_rec_infer.onnx")
        known = [*self._network.metadata["character"].splitlines(), " "]
        self._characters = {character: i for i, character in enumerate(known, start=1)}

    @override
    def examine(self, sample: MediaBatch) -> None:
        self._encode(sample)

    def rate(self, batch: MediaBatch) -> Float[Tensor, "n 1"]:
        """Score all samples at once."""
        targets = [self._encode(batch.take([i])) for i in range(len(batch))]
        images = batch.media[:, 0].float().cpu()
        width = round(images.shape[3] * _HEIGHT / images.shape[2])
        resized = F.interpolate(images, (_HEIGHT, width), mode="bilinear")
        probabilities = self._network(resized.flip(1) * 2 - 1)  # BGR in [-1, 1]
        return log_likelihood(probabilities.clamp(min=_LEAST).log(), targets)[:, None]

    def _encode(self, sample: MediaBatch) -> list[int]:
        target = find_target(sample.prompts[0], metadata_of(sample))
        unknown = sorted({*target} - {*self._characters})
        if unknown:
            raise Unscorable(f"PP-OCRv4 cannot read {unknown} of the text it should show")
        return [self._characters[character] for character in target]


def log_likelihood(
    log_probabilities: Float[Tensor, "n t c"], targets: list[list[int]]
) -> Float[Tensor, "n"]:
    """Return the CTC log-likelihood per character of each target; character 0 is the blank.

    It is -inf for a target that does not fit into t columns.
    """
    n, t, _ = log_probabilities.shape
    lengths = torch.tensor([len(target) for target in targets])
    losses = F.ctc_loss(
        log_probabilities.transpose(0, 1),
        torch.tensor([i for target in targets for i in target]),
        torch.full((n,), t),
        lengths,
        reduction="none",
    )
    return -losses / lengths
