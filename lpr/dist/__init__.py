"""Process groups, membership and the collectives of a job."""
