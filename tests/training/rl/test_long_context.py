"""A long chain of thought against a large vocabulary, on a small machine."""

import pytest
from run_files import records

LENGTH, VOCAB = 16384, 151936  # the logits alone would be 9.3 GiB a response in float32, and a trainer holds several


@pytest.mark.slow
def test_a_long_response_takes_a_training_step(trained, write_model, write_reward):
    """One narrow layer, for a CPU: what is long and wide is the same as in a large model."""
    wide = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 32,
        "head_dim": 16,
        "tie_word_embeddings": True,
    }
    config = trained(
        model={"config": str(write_model(max_position_embeddings=LENGTH + 4, **wide))},
        reward={"function": write_reward("return [float(i) for i in range(len(prompts))]")},
        kl={"coef": 0.1},
        rollout={"prompts_per_step": 1, "num_generations": 2, "max_new_tokens": LENGTH},
        optimizer={"warmup_updates": 0},
        training={"steps": 1, "minibatches": 1, "micro_batch_tokens": 14, "memory_budget": "512MiB"},
        evaluation={"every": None, "metrics": []},
        data={"eval_path": None},
    )
    (numbers,) = records(config)
    # Each ends early with probability 0.1; the longest one is what must fit.
    assert numbers["truncated"] >= 0.5 and numbers["length"] >= LENGTH / 2
    assert numbers["grad_norm"] > 0 and numbers["skipped_updates"] == 0
    assert numbers["mismatch/abs_log_ratio"] < 1e-4
    # A 24 GB machine, of which the process may have half; and the losses were as long as they say.
    assert numbers["memory/peak_gib"] < 12
    assert 0 < numbers["time/loss_share"] < 1
    print({name: numbers[name] for name in ("length", "memory/peak_gib", "time/generate", "time/update", "time/loss")})
