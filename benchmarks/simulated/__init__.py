"""What is predicted for machines that we do not have, and what the predictions are checked against."""
