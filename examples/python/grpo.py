# SPDX-License-Identifier: Apache-2.0
"""GRPO (Shao et al. 2024, arXiv:2402.03300) on a toy task: answers of even token ids.

usage: grpo.py MODEL_DIR [STEPS]     prints the mean reward of each step

Of each prompt a group of answers is sampled; the advantage of an answer is its reward, less the group's mean, divided
by the group's standard deviation. Loss: importance_sampling, -sum_t exp(log p_t - q_t) A_t, one update per batch.
"""
import statistics
import sys

import ballast

GROUP, LENGTH = 8, 8
PROMPTS = [[5, 11, 23], [17, 40, 9], [60, 3, 31], [44, 8, 70]]


def reward(answer):
    return sum(token % 2 == 0 for token in answer) / len(answer) if answer else 0.0


def sample_group(policy, prompt, seed):
    """Rows of the answers to a prompt, and their rewards."""
    answers = [policy.sample(prompt, max_tokens=LENGTH, seed=seed + i) for i in range(GROUP)]
    rewards = [reward(answer) for answer in answers]
    mean, spread = statistics.mean(rewards), statistics.pstdev(rewards) + 1e-4
    rows = []
    for answer, value in zip(answers, rewards):
        if answer:
            targets = [-100] * (len(prompt) - 1) + answer  # the last token predicts nothing
            rows.append({"input_ids": (prompt + answer)[:-1], "targets": targets,
                         "advantages": [(value - mean) / spread] * len(targets)})
    return rows, rewards


def main():
    model, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20
    with ballast.Session(model, max_seq_length=32, per_device_train_batch_size=GROUP, device="cpu") as session:
        policy = session.create_lora(r=8, alpha=16, seed=0)
        for step in range(steps):
            rows, rewards = [], []
            for i, prompt in enumerate(PROMPTS):
                more, values = sample_group(policy, prompt, seed=(step * len(PROMPTS) + i) * GROUP)
                rows += more
                rewards += values
            sampled = policy.forward([{key: row[key] for key in ("input_ids", "targets")} for row in rows])
            for row, logprobs in zip(rows, sampled):
                row["logprobs"] = logprobs
            policy.forward_backward(rows, loss="importance_sampling")
            policy.optim_step(lr=1e-2)
            print(f"step {step + 1}: reward {statistics.mean(rewards):.3f}", flush=True)


if __name__ == "__main__":
    main()
