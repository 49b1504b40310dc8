"""Replay: a request trace drives an engine model, which drives the real kernels, step by step, into a trace.

    load = shape_workload(read_workload(Path("azure.csv")), limit=1000)
    result = replay_workload(load, Path("traces"), knobs=EngineKnobs(max_running_requests=64))

Names stand in `readers`, `workloads`, `synthetic`, `knobs`, `engine`, `faults` and `runner`. Only `canary` needs torch.
"""
