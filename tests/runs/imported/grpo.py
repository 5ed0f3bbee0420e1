import ml_collections
import imp
import os

base = imp.load_source("base", os.path.join(os.path.dirname(__file__), "base.py"))


def _common():
    config = base.get_config()
    config.pretrained.model = "stabilityai/stable-diffusion-3.5-medium"
    config.resolution = 512
    config.sample.num_steps = 10
    config.sample.eval_num_steps = 40
    config.train.num_inner_epochs = 1
    config.train.ema = True
    return config


def text_sd3():
    gpu_number = 16
    config = _common()
    config.dataset = os.path.join(os.getcwd(), "dataset/signs")
    config.sample.train_batch_size = 6
    config.sample.num_image_per_prompt = 12
    config.sample.num_batches_per_epoch = int(32 / (gpu_number * config.sample.train_batch_size / 12))
    assert config.sample.num_batches_per_epoch % 2 == 0
    config.train.batch_size = config.sample.train_batch_size
    config.train.gradient_accumulation_steps = config.sample.num_batches_per_epoch // 2
    config.train.timestep_fraction = 0.99
    config.train.beta = 0.03
    config.train.learning_rate = 2e-4
    config.train.clip_range = 2e-4
    config.num_epochs = 900
    config.reward_fn = {"ocr": 1.0}
    return config


def fast_sd3():
    gpu_number = 8
    config = _common()
    config.sample.guidance_scale = 1
    config.train.cfg = False
    config.sample.train_batch_size = 8
    config.sample.num_image_per_prompt = 16
    config.sample.num_batches_per_epoch = 4
    config.train.batch_size = 8
    config.train.gradient_accumulation_steps = 2
    config.train.clip_range = 3e-5
    config.train.beta = 0
    config.sample.noise_level = 0.8
    config.sample.sde_window_size = 3
    config.sample.sde_window_range = (0, config.sample.num_steps // 2)
    config.sample.sde_type = "cps"
    config.num_epochs = 400
    config.reward_fn = {"pickscore": 0.7, "my_own_judge": 0.3}
    config.train.sft = 0.1
    return config


def pick_flux():
    gpu_number = 8
    config = _common()
    config.pretrained.model = "black-forest-labs/FLUX.1-dev"
    config.sample.num_steps = 6
    config.sample.guidance_scale = 3.5
    config.sample.train_batch_size = 3
    config.sample.num_image_per_prompt = 24
    config.sample.num_batches_per_epoch = 16
    config.train.batch_size = 3
    config.train.gradient_accumulation_steps = 8
    config.train.timestep_fraction = 0.5
    config.train.beta = 0.002
    config.sample.noise_level = 0.9
    config.sample.global_std = False
    config.sample.same_latent = True
    config.mixed_precision = "bf16"
    config.num_epochs = 300
    config.reward_fn = {"pickscore": 1.0}
    return config
