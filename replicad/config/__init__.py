"""Settings: how they are declared and parsed (`declaring`), their list (`settings`, `limits`), and the logs."""
