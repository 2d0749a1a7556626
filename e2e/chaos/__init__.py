"""The fault campaign: breaks what can break under a served deployment on two nodes, and measures how it heals.

Run it by ``make chaos``. The table is in ``faults``, what is done in ``injection``, what is seen in ``watching``, what
it means in ``outcome``, and how it is told in ``report``.
"""
