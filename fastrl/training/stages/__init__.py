"""The stages around RL training: supervised fine-tuning, DPO, reward models and sampling, each a thin command.

``fastrl sft``, ``fastrl dpo`` and ``fastrl reward-model`` write a model that is the next stage's ``model.path``, and
``fastrl sample`` a file that ``fastrl sft`` trains on. A run that is interrupted leaves a checkpoint to resume from;
interrupted sampling is started again.
"""
