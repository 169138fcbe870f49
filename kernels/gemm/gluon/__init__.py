"""Long x on Hopper, in Gluon: wgmma fed from registers; first file: gluon_launch.py."""
