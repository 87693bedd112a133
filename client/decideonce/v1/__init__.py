"""The wire contract decideonce.v1: messages and stubs, generated from protos/."""
