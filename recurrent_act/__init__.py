"""Recurrent networks that ponder: LSTM, GRU and RNN with halting."""
