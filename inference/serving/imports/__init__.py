"""Heads that other trainers wrote, as ordinary heads of Headstart."""
