"""Run the commands: each module has `run(args)` and is imported only when its command is used."""
