"""What replicas of a fleet share: finished outputs as drafts for each other, and how a router finds the right one."""
