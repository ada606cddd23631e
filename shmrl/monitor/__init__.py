"""What a run says about itself: logs, metrics, rollouts, the console."""
