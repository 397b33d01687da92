mod attention;
mod blocks;
mod build;
mod elementwise;
mod linear;
mod order;
mod random;
