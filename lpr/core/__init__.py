"""The pure core: token trees, drafts and acceptance. It knows no model, no process group, no clock."""
