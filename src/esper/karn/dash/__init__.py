"""The live page: runs of a directory in the browser, on the loopback interface only.

Read `guard.py` first: it decides which requests reach the application.
"""
