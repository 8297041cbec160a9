"""Where completions come from: `generate` in the trainer's process, or an inference engine with the policy's weights.

`protocol` is what an engine must do (four methods), `sampler` draws rollouts from any engine, and the other modules
are the engines.
"""
