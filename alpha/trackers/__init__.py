"""TensorBoard and Weights & Biases beside a run ([log]): each client in a process of its own that reads the run's metrics. Floor 7.

The client's process is started before the training session and told the run directory over a pipe; nothing comes back. So its libraries
meet nothing of the run, no step waits for it, and however it ends, the run's bits and exit code are the same.
"""
