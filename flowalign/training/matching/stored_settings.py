"""Define the settings of examples of a dataset on disk."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from flowalign.data.preference.dataset import PreferenceDataset
from flowalign.data.preference.preference_data import GapWeights, Kind
from flowalign.training.matching.stored_credit import check_method
from flowalign.types import CreditEstimator
from flowalign.types.ranges import NonNegativeInt, PositiveInt, UnitInterval, require_ranges


@dataclass(frozen=True, kw_only=True)
class StoredSettings:
    """Settings of pairs or labelled samples from a dataset on disk."""

    path: str
    """Path of the dataset: a file, or a folder of parquet files."""
    kind: Kind = "pairs"
    """Kind of the examples. pairs: preference pairs. samples: samples with binary labels.
    attributes: samples with the texts `positive` and `negative`, which need a teacher. captions:
    labelled samples with both texts, for the same teacher."""
    held_out: str | None = None
    """Path of held-out pairs, which are only used to evaluate the agreement of the policy. They are
    pairs even if `kind` is samples. Null: none."""
    schema: str = "auto"
    """Name of the dataset reader. auto: detected from the columns."""
    root: str | None = None
    """Base folder of relative paths. Null: the folder of the dataset."""
    columns: dict[str, str | list[str]] | None = None
    """Columns of the dataset by their names in flowalign, such as `chosen: winner`; a list of
    columns becomes one list. Null: as they are."""
    dimensions: Sequence[str] = ()
    """Preference dimensions to use. Empty: all."""
    batch_size: PositiveInt = 64
    """Number of pairs or samples per step, over all processes."""
    cache: str | None = None
    """Folder of cached latents and prompt embeddings, shared by runs. Null: kept in memory."""
    cache_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the cached latents."""
    max_frames: PositiveInt | None = None
    """Largest number of video frames, evenly spaced and independent of the frame rate. Null: the
    policy's number of frames at its frame rate, from the start."""
    mixed_shapes: bool = False
    """Whether to use pairs with different sizes or numbers of frames, by cropping both."""
    flip: UnitInterval = 0.0
    """Probability in [0, 1] that both samples of a pair are mirrored. Leave it at 0 for prompts
    with left or right."""
    prompt_dropout: UnitInterval = 0.0
    """Probability in [0, 1] that a pair is trained without its prompt. It preserves the
    unconditional branch for guidance."""
    user_dropout: UnitInterval = 0.0
    """Probability in [0, 1] that a personalised policy is trained without the user (PPD)."""
    skip_choices: NonNegativeInt = 0
    """Number of first pairs of each user that are not trained, because `flowalign users` embedded
    them. 0: none."""
    weighting: GapWeights | None = None
    """Weights of pairs as a function of the gap between their scores. Null: equal weights."""
    stage_steps: NonNegativeInt = 0
    """Number of steps per curriculum stage: pairs of stage k are used after k stages. 0: no
    curriculum."""
    credit: CreditEstimator | None = None
    """Credit method from `flowalign.credit`, for pairs with the columns `values_chosen` and
    `values_rejected`: lists of the values of the denoising states 0 to T. The lead of the chosen
    item's credit weights the noise levels of each step, relative to the mean lead; steps without a
    lead are skipped. Null: equal weights."""
    held_out_pairs: PositiveInt = 256
    """Largest number of held-out pairs to evaluate."""
    max_dropped_fraction: UnitInterval = 0.05
    """Largest allowed share of unusable pairs or samples; above it the run does not start. Expected
    rows, such as ties and repeated pairs, are reported but not counted."""

    def __post_init__(self) -> None:
        """Reject settings outside their ranges, and pair settings for samples."""
        require_ranges(self, "recipe.data")
        if self.credit is not None:
            self._check_credit(self.credit)
        pairwise = self.weighting or self.stage_steps or self.skip_choices
        if not self.paired and pairwise:
            raise ValueError(
                "recipe.data.weighting, stage_steps and skip_choices need kind: pairs; "
                f"recipe.data.kind is {self.kind}"
            )

    @property
    def dataset(self) -> PreferenceDataset:
        """Return the training dataset."""
        return PreferenceDataset(
            path=self.path,
            kind=self.kind,
            schema=self.schema,
            root=self.root,
            dimensions=self.dimensions,
            mixed_shapes=self.mixed_shapes,
            skip_choices=self.skip_choices,
            columns=self.columns,
        )

    @property
    def held_out_dataset(self) -> PreferenceDataset | None:
        """Return the dataset of held-out pairs, or None."""
        if self.held_out is None:
            return None
        kind = self.kind if self.paired else "pairs"
        return replace(self.dataset, path=self.held_out, kind=kind, skip_choices=0)

    @property
    def paired(self) -> bool:
        """Return False for samples; a sample with attributes is compared with itself."""
        return self.kind in ("pairs", "attributes")

    def _check_credit(self, credit: CreditEstimator) -> None:
        """Raise ValueError if the examples or the credit method cannot have step weights."""
        if self.kind != "pairs":
            raise ValueError(
                f"recipe.data.credit needs kind: pairs; recipe.data.kind is {self.kind}. For "
                "samples with step-level credit take ScoredGroups"
            )
        check_method(credit)
