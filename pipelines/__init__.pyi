from .any_pipeline.any_flow import AnyFlow as AnyFlow
from .families.cogvideox import CogVideoX as CogVideoX
from .families.flux1 import Flux1 as Flux1, Flux1Fill as Flux1Fill, Flux1Kontext as Flux1Kontext
from .families.flux2 import Flux2 as Flux2, Flux2Klein as Flux2Klein
from .families.hunyuan import (
    HunyuanVideo as HunyuanVideo,
    HunyuanVideo15 as HunyuanVideo15,
    HunyuanVideo15I2V as HunyuanVideo15I2V,
)
from .families.krea2 import Krea2 as Krea2
from .families.ltx import LTX as LTX, LTXI2V as LTXI2V
from .families.ltx2 import LTX2 as LTX2, LTX2I2V as LTX2I2V
from .families.qwen_image import QwenImage as QwenImage, QwenImage21 as QwenImage21
from .families.qwen_image_edit import QwenImageEdit as QwenImageEdit
from .families.sana import Sana as Sana
from .families.sd3 import SD3 as SD3
from .families.unet import SD15 as SD15, SDXL as SDXL, UNetPolicy as UNetPolicy
from .families.wan import (
    Wan as Wan,
    Wan22 as Wan22,
    Wan22I2V as Wan22I2V,
    WanI2V as WanI2V,
    WanTI2V as WanTI2V,
)
from .families.z_image import ZImage as ZImage
from .network.weights import Lora as Lora
from .policy import DiffusersPolicy as DiffusersPolicy
