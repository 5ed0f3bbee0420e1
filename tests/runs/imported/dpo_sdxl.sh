#!/bin/bash
export MODEL_NAME="stabilityai/stable-diffusion-xl-base-1.0"
export DATA=pairs.jsonl

accelerate launch --num_processes=4 --mixed_precision=bf16 train_diffusion_dpo_sdxl.py \
  --pretrained_model_name_or_path=$MODEL_NAME \
  --dataset_name=$DATA \
  --train_batch_size=2 \
  --gradient_accumulation_steps=16 \
  --gradient_checkpointing \
  --rank=8 \
  --learning_rate=1e-5 \
  --lr_scheduler="constant" --lr_warmup_steps=0 \
  --max_train_steps=2000 \
  --beta_dpo=5000 \
  --random_crop \
  --seed="3"
