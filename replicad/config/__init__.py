"""Settings: how one is declared and found (`declaring`), which there are (`settings`, `limits`), and the logs."""
