"""What lpr changes of a foreign model."""
