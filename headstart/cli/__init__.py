"""The command `headstart`: one module per group of subcommands."""
