from .any_pipeline.any_flow import AnyFlow as AnyFlow
from .families.cogvideox import CogVideoX as CogVideoX
from .families.flux1 import Flux1 as Flux1
from .families.flux1_fill import Flux1Fill as Flux1Fill
from .families.flux1_kontext import Flux1Kontext as Flux1Kontext
from .families.flux2 import Flux2 as Flux2
from .families.flux2_klein import Flux2Klein as Flux2Klein
from .families.hunyuan import HunyuanVideo as HunyuanVideo
from .families.hunyuan15 import HunyuanVideo15 as HunyuanVideo15
from .families.hunyuan15_i2v import HunyuanVideo15I2V as HunyuanVideo15I2V
from .families.hyper_align import HyperAlign as HyperAlign, HyperAlignFlux1 as HyperAlignFlux1
from .families.krea2 import Krea2 as Krea2
from .families.ltx import LTX as LTX
from .families.ltx2 import LTX2 as LTX2
from .families.ltx2_i2v import LTX2I2V as LTX2I2V
from .families.ltx_i2v import LTXI2V as LTXI2V
from .families.personal import PersonalSD15 as PersonalSD15, PersonalSDXL as PersonalSDXL
from .families.qwen_image import QwenImage as QwenImage
from .families.qwen_image21 import QwenImage21 as QwenImage21
from .families.qwen_image_edit import QwenImageEdit as QwenImageEdit
from .families.sana import Sana as Sana
from .families.sd3 import SD3 as SD3
from .families.sd15 import SD15 as SD15
from .families.sdxl import SDXL as SDXL
from .families.unet import UNetPolicy as UNetPolicy
from .families.wan import Wan as Wan
from .families.wan22 import Wan22 as Wan22, Wan22I2V as Wan22I2V
from .families.wan_i2v import WanI2V as WanI2V, WanTI2V as WanTI2V
from .families.z_image import ZImage as ZImage
from .network.weights import Lora as Lora
from .policy import DiffusersPolicy as DiffusersPolicy
