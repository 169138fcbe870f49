"""How stages exchange messages: queues, gloo, peer memory, NCCL."""
