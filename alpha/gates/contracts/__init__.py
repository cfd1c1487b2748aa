"""Cases of the components that have no op row: passes, executor, program, models, optimizers, FLOPS model. Floor 7."""
