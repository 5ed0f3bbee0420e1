from .adjoint_matching import AdjointMatching as AdjointMatching
from .draft import AlignProp as AlignProp
from .direct_align import DirectAlign as DirectAlign
from .draft import DRaFT as DRaFT
from .draft import DRaFTLV as DRaFTLV
from .draft import DRTune as DRTune
from .leap_align import FlowBPSparse as FlowBPSparse
from .leap_align import LeapAlign as LeapAlign
from .steps import Leaps as Leaps, UniformLeaps as UniformLeaps
from .draft import ReFL as ReFL
from .draft import VADER as VADER
