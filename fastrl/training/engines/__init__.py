"""Where completions come from: `generate` in the trainer's process, or an inference engine with the policy's weights.

`protocol` is what an engine must do (four methods), and `sampler` draws rollouts from any. The engines are
`transformers` and `vllm_server`.
"""
