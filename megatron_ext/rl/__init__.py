"""The RL loop: prompts, rollouts, rewards, advantages, updates, weight sync, checkpoints, metrics."""
