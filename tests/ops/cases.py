"""Cases of routed attention that its forward and its backward are both tested with, by name."""

# Under the interpreter a tile has 32 queries and 16 keys.
XA_CASES = {
    "FA-XA": {"length": 70, "mode_pair": "FA-XA"},
    "XA-SSA": {"length": 70, "mode_pair": "XA-SSA"},
    "XA-chunk": {"length": 102, "query_length": 38, "mode_pair": "FA-XA"},
    "XA-padded": {"length": 50, "batch": 2, "start": [0, 17], "mode_pair": "XA-SSA"},
    "XA-packed": {"length": 70, "cu_seqlens": [0, 45, 70], "mode_pair": "FA-XA"},
}
GPU_CASES = {
    "small-window": {"length": 700, "sink_size": 0, "window_size": 1},
    "wide-sink": {"length": 700, "sink_size": 300, "window_size": 50},
    "chunk": {"length": 900, "query_length": 200},
    "padded": {"length": 640, "batch": 3, "start": [0, 201, 640]},
    "packed": {"length": 600, "batch": 2, "cu_seqlens": [0, 1, 300, 600, 860, 1200]},
    "sinks": {"length": 400, "sinks": True},
    "FA-XA": {"length": 900, "mode_pair": "FA-XA", "block_size": 128},
    "XA-SSA": {"length": 900, "mode_pair": "XA-SSA", "block_size": 256, "batch": 2, "start": [0, 77]},
}
