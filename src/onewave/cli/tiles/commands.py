"""`onewave tiles`: the table of its commands."""

from onewave.cli.commands import Listed, group

tiles = group(
    {
        "bounds": Listed("tiles.simulate:bounds_command", "Lower bounds on traffic, and every order's gap to them."),
        "compare": Listed("tiles.traces:compare_command", "Set two traces side by side, phase by phase."),
        "simulate": Listed(
            "tiles.simulate:simulate_command", "Simulate a program: traffic, time, idle, energy, gap to bounds."
        ),
        "staircase": Listed("tiles.simulate:staircase_command", "A product's time over M: the steps that waves make."),
        "timeline": Listed("tiles.traces:timeline_command", "Say where a launch's time goes, stage by stage."),
        "interpret": Listed("tiles.verify:interpret_command", "Run a task table in NumPy under random interleavings."),
        "verify": Listed("tiles.verify:verify_command", "Prove that a schedule is safe, or show how it is not."),
        "plan": Listed("tiles.plan:plan_command", "Write a decode step's plan as a file that may be edited."),
        "lower": Listed("tiles.lower:lower_command", "Prove a program's schedule, write it as a task table."),
        "chimera": Listed(
            "tiles.related:chimera_command", "Block order and sizes of two chained products, by closed form."
        ),
        "fuse": Listed("tiles.related:fuse_command", "Which operators to fuse so that the fewest bytes move."),
        "place": Listed("tiles.related:place_command", "On which level each intermediate should live."),
        "reuse": Listed("tiles.related:reuse_command", "How often each tensor's bytes are used again."),
        "search": Listed("tiles.search:search_command", "Search the order of C's tiles that loads the fewest panels."),
        "sync": Listed("tiles.related:sync_command", "Where one launch needs a grid-wide sync, and where none."),
    },
    help="Order, simulate, search, prove and lower tile graphs. Needs neither torch nor a GPU.",
)
