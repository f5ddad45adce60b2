"""`ftd doctor`: whether this host suits ftd. `probe` looks, `checks` judges what was seen, `report` shows it."""
