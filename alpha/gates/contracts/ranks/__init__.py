"""Collectives, transport, watch, launch and supervisor under the gates: members in processes of a warm server, and their cases. Floor 7."""
