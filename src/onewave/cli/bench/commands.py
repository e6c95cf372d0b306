"""`onewave bench`: the table of its commands."""

from onewave.cli.commands import Listed, group

bench = group(
    {
        "latency": Listed("bench.latency:latency", "Measure prefill, decode and the memory's read ceiling."),
        "memory": Listed("bench.memory:memory", "Replay a serving run's allocations through several allocators."),
        "ops": Listed("bench.operators.ops:ops", "Time operators one by one, beside their peers."),
        "peers": Listed("bench.peers:peers", "Measure this engine beside transformers and llama.cpp."),
        "predict": Listed("bench.predict:predict", "Predict a decode step as one launch, without a GPU."),
        "prompt": Listed(
            "bench.prompt:prompt", "Time prompts to their first token, the GPU's and the host's part apart."
        ),
        "serve": Listed("bench.serve:serve", "Measure a running server's latencies under load."),
        "startup": Listed("bench.startup:startup", "Time a model's loading and first answer in new processes."),
        "throughput": Listed("bench.throughput:throughput", "Measure tokens a second of many requests at once."),
        "warm": Listed("bench.startup:warm", "Time the first calls of attention's kernels."),
        "wave": Listed("bench.wave:wave", "Time a decode step as one launch and as a CUDA graph."),
    },
    help="Measure speed.",
)
