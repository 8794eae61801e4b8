"""What did the deleted function do? Real calls and small changes of them, as a hidden truth."""
