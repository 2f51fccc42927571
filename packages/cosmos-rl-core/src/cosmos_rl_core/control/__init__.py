"""The controller: one server that feeds messages to the ledger and sends what the ledger answers.

No torch. Used by `launch`; `workers.client` is the other end.
"""
