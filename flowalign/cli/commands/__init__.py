"""Do the work of the verbs: `run(args)` of each module, which is loaded by name when called."""
