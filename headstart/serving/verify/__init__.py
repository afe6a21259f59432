"""Engines that draft with heads, each as a function of the same form, and the comparison of what they drafted."""
