"""The KV cache of a stage: plain, in few bits, and with a copy for drafts beside it."""
