import imp
import os

base = imp.load_source("base", os.path.join(os.path.dirname(__file__), "base.py"))


def _make(n_gpus=1, updates=1, reward_fn={}, name=""):
    config = base.get_config()
    config.pretrained.model = "stabilityai/stable-diffusion-3.5-medium"
    config.resolution = 512
    config.sample.num_steps = 10
    config.sample.num_image_per_prompt = 24
    config.train.beta = 0.0002
    size = 9
    groups = 32
    while True:
        if groups * 24 % (n_gpus * size) == 0 and size * n_gpus % 24 == 0:
            batches = groups * 24 // (n_gpus * size)
            if batches % updates == 0:
                config.sample.train_batch_size = size
                config.sample.num_batches_per_epoch = batches
                config.train.batch_size = size
                config.train.gradient_accumulation_steps = batches // updates
                break
        size -= 1
    config.train.timestep_fraction = 0.99
    config.run_name = f"nft_{name}"
    config.reward_fn = reward_fn
    config.decay_type = 1
    config.beta = 1.0
    config.train.adv_mode = "all"
    config.sample.guidance_scale = 1.0
    config.sample.eval_guidance_scale = 1.0
    config.sample.deterministic = True
    config.sample.solver = "dpm2"
    config.num_epochs = 500
    return config


def sd3_pick():
    return _make(n_gpus=8, updates=1, reward_fn={"pickscore": 1.0}, name="pick")


def sd3_signs():
    config = _make(n_gpus=16, updates=2, reward_fn={"ocr": 1.0}, name="signs")
    config.beta = 0.1
    config.decay_type = 2
    return config
