from .adjoint_matching import AdjointMatching as AdjointMatching
from .steps import AlignProp as AlignProp
from .direct_align import DirectAlign as DirectAlign
from .steps import DRaFT as DRaFT
from .steps import DRaFTLV as DRaFTLV
from .steps import DRTune as DRTune
from .steps import FlowBPSparse as FlowBPSparse
from .steps import LeapAlign as LeapAlign
from .steps import Leaps as Leaps, UniformLeaps as UniformLeaps
from .steps import ReFL as ReFL
from .steps import VADER as VADER
