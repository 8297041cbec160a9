"""The stages around RL training: supervised fine-tuning, DPO, reward models and sampling, each a thin command.

`fastrl sft`, `fastrl dpo` and `fastrl reward-model` write a model that can be the next stage's `model.path`, and
`fastrl sample` writes a file that `fastrl sft` trains on. An interrupted run leaves a checkpoint to resume from;
interrupted sampling must be started again.
"""
