"""All components of the house, where the engines look for them. Floor 7."""

from alpha.train.house import house

__all__ = ["house"]
