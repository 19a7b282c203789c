import "./story.js";
import { ask, show } from "./asks.js";

show(ask("/parrot/"));
