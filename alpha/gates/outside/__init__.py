"""Gates for a kernel that lies in a user's own folder: nothing of it enters the repository, a catalogue or a training run. Floor 7."""
