from .adjoint_matching import AdjointMatching as AdjointMatching
from .align_prop import AlignProp as AlignProp
from .direct_align import DirectAlign as DirectAlign
from .draft import DRaFT as DRaFT
from .draft_lv import DRaFTLV as DRaFTLV
from .drtune import DRTune as DRTune
from .flowbp_sparse import FlowBPSparse as FlowBPSparse
from .leap_align import LeapAlign as LeapAlign
from .leaps import Leaps as Leaps, UniformLeaps as UniformLeaps
from .refl import ReFL as ReFL
from .vader import VADER as VADER
