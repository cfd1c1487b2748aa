"""Where each millisecond and byte of a step went: phases, recorder, store, metrics, trace, noise rules. Floor 3.

An executor and the training loop fill a `Recorder`; the recorder hands closed rows to a `Store` that a background thread writes; readers
(alpha.report, alpha.dashboard) look only at the store. Nothing here knows a back end.
"""
