"""The public names for type checkers, since `__init__.py` imports each name on first use."""

from fastdiff.acceleration import accelerate as accelerate
from fastdiff.acceleration import restore as restore
from fastdiff.bulk.launching import draw_many as draw_many
from fastdiff.engine import Engine as Engine
from fastdiff.errors import InputError as InputError
from fastdiff.errors import NonFiniteError as NonFiniteError
from fastdiff.models.autoencoder import AutoencoderKL as AutoencoderKL
from fastdiff.models.autoencoder_tiny import AutoencoderTiny as AutoencoderTiny
from fastdiff.models.clip import CLIPTextModel as CLIPTextModel
from fastdiff.models.clip import CLIPTextModelWithProjection as CLIPTextModelWithProjection
from fastdiff.models.clip_vision import CLIPVisionModelWithProjection as CLIPVisionModelWithProjection
from fastdiff.models.controlnet import ControlNetModel as ControlNetModel
from fastdiff.models.dit import DiTTransformer2DModel as DiTTransformer2DModel
from fastdiff.models.qwen3 import Qwen3Model as Qwen3Model
from fastdiff.models.unet1d import UNet1DModel as UNet1DModel
from fastdiff.models.unet2d import UNet2DModel as UNet2DModel
from fastdiff.models.unet2d_condition import UNet2DConditionModel as UNet2DConditionModel
from fastdiff.models.z_image import ZImageTransformer2DModel as ZImageTransformer2DModel
from fastdiff.pipelines import LabelPipeline as LabelPipeline
from fastdiff.pipelines import Pipeline as Pipeline
from fastdiff.pipelines import TextToImagePipeline as TextToImagePipeline
from fastdiff.pipelines import TrajectoryPipeline as TrajectoryPipeline
from fastdiff.pipelines import ZImagePipeline as ZImagePipeline
from fastdiff.pipelines.reporting import report as report
from fastdiff.requests.styles import Styles as Styles
from fastdiff.samplers.ddim import DDIMScheduler as DDIMScheduler
from fastdiff.samplers.ddpm import DDPMScheduler as DDPMScheduler
from fastdiff.samplers.deis import DEISMultistepScheduler as DEISMultistepScheduler
from fastdiff.samplers.dpm2 import KDPM2DiscreteScheduler as KDPM2DiscreteScheduler
from fastdiff.samplers.dpm2_ancestral import KDPM2AncestralDiscreteScheduler as KDPM2AncestralDiscreteScheduler
from fastdiff.samplers.dpm_singlestep import DPMSolverSinglestepScheduler as DPMSolverSinglestepScheduler
from fastdiff.samplers.dpm_solver import DPMSolverMultistepScheduler as DPMSolverMultistepScheduler
from fastdiff.samplers.euler import EulerDiscreteScheduler as EulerDiscreteScheduler
from fastdiff.samplers.euler_ancestral import EulerAncestralDiscreteScheduler as EulerAncestralDiscreteScheduler
from fastdiff.samplers.flow_match_euler import FlowMatchEulerDiscreteScheduler as FlowMatchEulerDiscreteScheduler
from fastdiff.samplers.heun import HeunDiscreteScheduler as HeunDiscreteScheduler
from fastdiff.samplers.lcm import LCMScheduler as LCMScheduler
from fastdiff.samplers.lms import LMSDiscreteScheduler as LMSDiscreteScheduler
from fastdiff.samplers.pndm import PNDMScheduler as PNDMScheduler
from fastdiff.samplers.tcd import TCDScheduler as TCDScheduler
from fastdiff.samplers.unipc import UniPCMultistepScheduler as UniPCMultistepScheduler

__version__: str
