MODEL="stable-diffusion-v1-5/stable-diffusion-v1-5"
# Paper: batches of 2048.
CUDA_VISIBLE_DEVICES=0,1,2,3 accelerate launch train.py --pretrained_model_name_or_path ${MODEL} \
  --dataset_name pairs.jsonl --train_batch_size 4 --gradient_accumulation_steps 8 --scale_lr \
  --max_train_steps 1500 --learning_rate 1e-8 --lr_scheduler constant_with_warmup --lr_warmup_steps 100 \
  --beta_dpo 2000 --mixed_precision fp16 --proportion_empty_prompts 0.2 --no_hflip
