"""`headstart push`: heads on the hub, with a model card of what is known and measured about them."""
